"""Build the extension; pyproject.toml has everything else."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

extension = CppExtension(
    "torch_example_device._C",
    sorted(str(path) for path in Path("csrc").glob("*.cpp")),
    # Without debug information and much optimization, it builds in a minute.
    extra_compile_args=["-std=c++20", "-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter"],
)

setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
