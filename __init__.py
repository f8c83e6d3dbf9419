"""Octavo: a Ray-hosted, multi-GPU LLM serving cluster with paged KV memory and a prefix-aware router."""
