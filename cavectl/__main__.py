"""Entry point. Answers `--version` and the shell's completion before anything heavy is imported."""

from __future__ import annotations

import sys


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] in (["--version"], ["-V"]):
        from cavectl import __version__

        print(f"cavectl {__version__}")  # noqa: T201
        return 0
    if arguments[:1] == ["__complete"]:
        from cavectl.names import complete

        return complete(arguments[1:])
    from cavectl.app import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
