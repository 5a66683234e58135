"""The drafters that run a language model: `model` and `self`. They need torch."""
