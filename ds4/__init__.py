"""ds4: an engine for DeepSeek-V4.1-Flash on one machine."""

__version__ = "0.1.0"
