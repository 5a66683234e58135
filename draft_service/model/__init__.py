"""The drafter `model`: a small language model of the target's tokenizer. Needs torch."""
