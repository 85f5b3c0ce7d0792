"""Compiles what `duel.compiled` loads; where there is no compiler, NumPy does the same in more time."""

import os

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "duel._compiled",
            ["src/duel/replacement/turns.c", "src/duel/rows.c"],
            extra_compile_args=[] if os.name == "nt" else ["-std=c99", "-O3"],
            optional=True,
        )
    ]
)
