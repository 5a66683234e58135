"""How much of what could go on for ever is done: some in `make test`, more in `make exactness`."""

import os

SWEEP = int(os.environ.get("EXACTNESS_SWEEP", "1"))  # times as many random examples of proofs in fractions
TEXTS = int(os.environ.get("EXACTNESS_TEXTS", "1"))  # times as many texts for a chi-square
