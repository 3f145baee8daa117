"""`python -m polyrhythm` is `polyrhythm`."""

from polyrhythm.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
