"""What bin/ds4 and bin/ds4-server start: Ctrl-C while the modules load ends as quietly as it does later.

python -m ds4.cli.entry main|serve ARGUMENTS
"""

import sys


def main() -> None:
    """Run the main() of ds4.cli.NAME, NAME being the first argument, with the others."""
    try:
        from importlib import import_module

        import_module(f"ds4.cli.{sys.argv.pop(1)}").main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
