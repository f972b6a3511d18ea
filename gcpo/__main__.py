"""``gcpo`` and ``python -m gcpo``: the command line, or what it lacks here."""

import importlib.metadata
import os
import sys


def main() -> int:
    """Entry point; returns the exit status: that of :func:`gcpo.cli.main`, 2 where a package is not installed, or 130
    after Ctrl-C."""
    while (free := os.open(os.devnull, os.O_RDWR)) < 3:  # a closed stream: the next file would be in its place
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    try:
        if sys.argv[1:] == ["--version"]:  # this and the methods need no extra
            os.write(1, f"gcpo {importlib.metadata.version('gcpo')}\n".encode())
        elif sys.argv[1:] == ["methods"]:
            from gcpo.reports.methods import methods_page

            os.write(1, methods_page().encode())
        else:
            from gcpo.cli import main as command

            return command()
        return 0
    except OSError as error:  # the output is full, or nobody reads it
        print(f"gcpo: {error}", file=sys.stderr)
        return 2
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
