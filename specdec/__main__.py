"""`specdec`, and `python -m specdec`: the command, whose imports can be interrupted without a traceback."""

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line, and exit."""
    try:
        from specdec import cli
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    main()
