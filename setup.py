"""Builds the native CPU kernels: one shared library with a plain C interface, each ISA level compiled by its own flags.

Everything else about the package stands in pyproject.toml. A machine without a C++ compiler still gets kvd, which
then runs on its reference kernels and says so at start.

KVD_NATIVE=require makes a failed build an error; KVD_NATIVE=no leaves the native kernels out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "packaging"))
from native_build import build_objects


class BuildNative(build_ext):
    """Compiles the same kernel sources once per ISA level and links them together."""

    def build_extension(self, ext: Extension) -> None:
        objects = build_objects(self.compiler, Path(self.build_temp), log=print)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread"], target_lang="c++", build_temp=self.build_temp
        )


wanted = os.environ.get("KVD_NATIVE", "")
setup(
    ext_modules=[]
    if wanted == "no"
    else [Extension("kvd_kernels.cpu._native", sources=[], optional=wanted != "require")],
    cmdclass={"build_ext": BuildNative},
)
