"""Compiles octavo's CPU kernels into one shared library, loaded by octavo/kernels/library.py. All
else is pyproject.toml's.

Every kernel file is compiled once per instruction set. Without a compiler the install goes on, and
torch does the work.
"""

from __future__ import annotations

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("octavo/kernels/csrc")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-unused-function"]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
X86 = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "avx512_bf16_emulated": [*AVX512, "-DOCTAVO_EMULATE_BF16"],
}
ISAS: dict[str, list[str]] = {
    "portable": [],
    **(X86 if platform.machine() in ("x86_64", "AMD64") else {}),
}


class BuildKernels(build_ext):
    """One library out of pool.cpp and of every other file for every instruction set."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python module: nothing in the name depends on Python's version."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Raises CompileError without a compiler; setuptools then goes on, since the extension is
        optional.
        """
        headers = sorted(map(str, SOURCES.glob("*.h")))
        shared = str(SOURCES / "pool.cpp")
        made_of = runpy.run_path("octavo/kernels/sources.py")["digest"](SOURCES)
        objects = self._compile([shared], "shared", [f'-DOCTAVO_SOURCES="{made_of}"'], headers)
        kernels = sorted(path for path in map(str, SOURCES.glob("*.cpp")) if path != shared)
        for isa, flags in ISAS.items():
            objects += self._compile(kernels, isa, [f"-DOCTAVO_ISA={isa}", *flags], headers)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread", "-s"], target_lang="c++"
        )

    def _compile(
        self, sources: list[str], isa: str, flags: list[str], headers: list[str]
    ) -> list[str]:
        extra = [*FLAGS, *WARNINGS, "-pthread", *flags]
        folder = str(Path(self.build_temp) / isa)
        return list(
            self.compiler.compile(sources, output_dir=folder, extra_postargs=extra, depends=headers)
        )


KERNELS = Extension(
    "octavo.kernels.libkernels",
    sources=sorted(map(str, SOURCES.glob("*.cpp"))),
    depends=sorted(map(str, SOURCES.glob("*.h"))),
    optional=True,
)

setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels})
