"""The package's description. It imports nothing but setuptools, so that building it never needs torch."""

from setuptools import find_packages, setup

setup(
    name="fsdp",
    version="0.1.0",
    description="Fully sharded data parallel training for PyTorch behind the FSDP1 interface",
    author="The fsdp authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["fsdp", "fsdp.*"]),
    package_data={"fsdp": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "tqdm>=4.60"],
    extras_require={
        "test": ["pytest>=8", "numpy"],
        "examples": ["tqdm", "numpy"],
        "libraries": ["transformers>=4.40", "peft>=0.10"],  # for tests/test_libraries.py, which is skipped without
        "clients": ["accelerate>=1.0", "transformers>=4.40", "peft>=0.10", "lightning>=2.4", "numpy"],
        "dev": ["ruff==0.17.5", "mypy==2.4.1"],
    },
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Operating System :: POSIX",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
