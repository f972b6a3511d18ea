"""``gcpo`` and ``python -m gcpo``: the command line, or what it lacks here."""

import sys


def main() -> int:
    """Entry point; returns the exit status: that of :func:`gcpo.cli.main`, 2 where a package is not installed, or 130
    after Ctrl-C."""
    try:
        from gcpo.cli import main as command

        return command()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gcpo"):
            raise
        how = 'in a checkout of the project: pip install ".[repro]"'
        print(f"gcpo: the command line needs the extra repro ({error}); {how}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # amid the first imports
        return 130


if __name__ == "__main__":
    sys.exit(main())
