"""`python -m benchmarks.toy_drafters`: a draft worker that also offers the toy."""

from benchmarks.toy_drafters import KINDS
from draft_service.__main__ import main

if __name__ == "__main__":
    main(KINDS)
