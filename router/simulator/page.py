"""Results as one HTML page, which needs nothing but itself: of a simulation, or of a load on a real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ command }}: {{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --rule: #ccc }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #16181c; --rule: #444 } }
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: var(--ink);
       background: var(--paper); overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border-bottom: 1px solid var(--rule); padding: .3em .8em; text-align: left }
.wide th, .wide td { white-space: nowrap }
td { font-variant-numeric: tabular-nums }
.wide { overflow-x: auto }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 1em }
figure { margin: 0 }
svg { width: 100%; height: auto }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% for line in summary %}<p>{{ line }}</p>
{% endfor %}<div class="wide" tabindex="0"><table>
<thead><tr>{% for cell in rows[0] %}{% if cell %}<th>{{ cell }}</th>{% else %}<td></td>{% endif %}
{% endfor %}</tr></thead>
<tbody>
{% for row in rows[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
<div class="figures">{% for figure in figures %}<figure>{{ figure | safe }}</figure>{% endfor %}</div>
<h2>Conditions</h2>
<table>
{% for name, value in conditions.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
</main>
</body>
</html>
"""


def page(
    command: str,
    title: str,
    summary: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Sequence[str],
    conditions: Mapping[str, object],
) -> str:
    """``summary``: paragraphs; ``rows``: headings first; ``figures``: ``<svg>`` elements. All else is text and is
    escaped."""
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(
        command=command, title=title, summary=summary, rows=rows, figures=figures, conditions=conditions
    )
