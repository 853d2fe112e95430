"""The package's description. It imports nothing but setuptools, so that building it never needs torch."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.*)"$', (HERE / "fsdp" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None, "fsdp/__init__.py has no __version__"

FOR_DEVELOPERS = {
    "test": ["pytest>=8"],
    "dev": ["ruff==0.17.5", "mypy==2.4.1"],
    # tests of these libraries are skipped without them
    "libraries": ["transformers>=4.40", "peft>=0.10", "pytorch-optimizer>=3.0"],
    "clients": [
        "accelerate>=1.0",
        "transformers>=4.40",
        "peft>=0.10",
        "lightning>=2.4",
        "bitsandbytes>=0.50",
        "trl>=1.0",
    ],
}

setup(
    name="fsdp",
    version=VERSION.group(1),
    description="Fully sharded data parallel training for PyTorch behind the FSDP1 interface",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The fsdp authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=["pytorch", "distributed", "training", "fsdp", "sharding"],
    packages=find_packages(include=["fsdp", "fsdp.*"]),
    package_data={"fsdp": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "numpy>=1.24", "tqdm>=4.60"],
    extras_require=FOR_DEVELOPERS,
    entry_points={"console_scripts": ["fsdp = fsdp.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
