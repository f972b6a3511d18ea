"""``gcpo`` and ``python -m gcpo``: the command line, or what it lacks here."""

import sys
from importlib.metadata import version


def main() -> int:
    """Entry point; returns the exit status: that of :func:`gcpo.cli.main`, or 2 where a package is not installed."""
    if sys.argv[1:] == ["--version"]:  # which needs no extra
        print(f"gcpo {version('gcpo')}")
        return 0
    try:
        from gcpo.cli import main as command
    except ModuleNotFoundError as error:
        print(f'gcpo: this needs the extra repro ({error}): in a checkout, pip install ".[repro]"', file=sys.stderr)
        return 2
    return command()


if __name__ == "__main__":
    sys.exit(main())
