"""Runs a module as `fusionkv COMMAND`, and reports a package that is not installed in one line."""

import importlib.util
import runpy
import sys
from collections.abc import Sequence


def launched(command: str, module: str, flags: Sequence[str]) -> list[str]:
    """The command line of a process that runs `module` as `fusionkv COMMAND`."""
    # -P: otherwise a folder `kernels` in the working directory would shadow a package of that name.
    return [sys.executable, "-P", "-m", __name__, command, module, *flags]


def missing_package(command: str, error: ModuleNotFoundError) -> str:
    """The line that says which package a command lacks.

    Raises `error` if the module is no package that installing would add.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in sys.stdlib_module_names or _installed(package):
        raise error
    return f'fusionkv {command} needs {package}, which is not installed: pip install "fusionkv[all]"'


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def main() -> int:
    """Runs the module that `launched` named. Returns 1 if a package is not installed."""
    _, command, module, *flags = sys.argv
    sys.argv = [module, *flags]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        print(missing_package(command, error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
