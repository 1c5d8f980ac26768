"""Installation. Versions stand in requirements.txt; tool settings in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def requirements() -> list[str]:
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


setup(
    name="vha-paddle",
    version="0.1.0",
    description="Virtual head attention for PaddlePaddle: train with virtual heads, fold, serve stock GQA-2",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["vha_paddle", "vha_paddle.*"]),
    install_requires=requirements(),
)
