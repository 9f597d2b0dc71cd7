"""Every supported family, converted by the real command and judged by the stock transformers class."""
