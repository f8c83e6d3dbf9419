"""From what the user names as MODEL to a folder in Hugging Face format."""

from .store import ResolvedModel, resolve_model

__all__ = ["ResolvedModel", "resolve_model"]
