"""The results of several policies as one HTML page, which needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>octavo simulate: {{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border-bottom: 1px solid #ccc; padding: .3em .8em; text-align: left; white-space: nowrap }
td { font-variant-numeric: tabular-nums }
.wide { overflow-x: auto }
svg { max-width: 100%; height: auto }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
<div class="wide"><table>
<thead><tr>{% for cell in rows[0] %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
<figure>{{ figure | safe }}</figure>
<h2>Conditions</h2>
<table>
{% for name, value in conditions.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
</body>
</html>
"""


def page(title: str, summary: str, rows: Sequence[Sequence[str]], figure: str, conditions: Mapping[str, object]) -> str:
    """``rows`` as ``table_rows`` gives them, ``figure`` an ``<svg>`` element; all else is text and is escaped."""
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(title=title, summary=summary, rows=rows, figure=figure, conditions=conditions)
