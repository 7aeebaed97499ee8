"""kvd: a local LLM server whose KV cache fits, is exact, and explains itself."""

__version__ = "0.1.0"
