"""The packages of the wheel; everything else about it is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["app", "app.*"]), "app.accelerate_configs", "app.recipes"])
