"""Octavo: a Ray-hosted, multi-GPU LLM serving cluster with paged KV memory and a prefix-aware router."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .cluster.offline.llm import LLM as LLM


def __getattr__(name: str) -> object:
    """``octavo.LLM`` is loaded when it is asked for: ``import octavo.worker.wire`` must stay cheap."""
    if name == "LLM":
        from .cluster.offline.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
