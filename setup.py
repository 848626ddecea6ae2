"""Metadata of the package that is computed; the rest is in pyproject.toml.

The address of the repository has one place, the variable JAXCL_REPOSITORY of a build:

  JAXCL_REPOSITORY=https://example.org/jaxcl python -m build

It makes the links of the README absolute, so that they work on PyPI, and adds the links
of the project. Without it both stay as they are.
"""

import os
import pathlib
import re
import shutil

import setuptools
from setuptools.command import build_py

REPOSITORY = os.environ.get("JAXCL_REPOSITORY", "").rstrip("/")


def read_readme() -> str:
    """Read the README; its links lead to the repository if that is known."""
    text = pathlib.Path(__file__).with_name("README.md").read_text()
    if not REPOSITORY:
        return text
    text = re.sub(r"!(\[[^]]*\])\((?!http)", rf"!\1({REPOSITORY}/raw/main/", text)
    return re.sub(
        r"(?<!!)(\[[^]]*\])\((?!http|#)", rf"\1({REPOSITORY}/blob/main/", text
    )


def list_links() -> dict[str, str]:
    """List the links of the project by name; none if the repository is unknown."""
    pages = {
        "Source": "",
        "Documentation": "/tree/main/docs",
        "Issues": "/issues",
        "Changelog": "/blob/main/CHANGELOG.md",
    }
    return {name: REPOSITORY + page for name, page in pages.items() if REPOSITORY}


class BuildWithConfigs(build_py.build_py):
    """Copy configs/ into the package, as jaxcl/configs.

    An editable install finds them in the checkout. Since no package is mapped, it is a
    plain path: `import jaxcl` works in the folder that holds the checkout, too.
    """

    def run(self):
        """Build the package, and copy the configs beside it."""
        super().run()
        if not self.editable_mode:
            copy = pathlib.Path(self.build_lib, "jaxcl", "configs")
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree("configs", copy, dirs_exist_ok=True, ignore=ignore)


setuptools.setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    project_urls=list_links(),
    packages=setuptools.find_packages(include=["jaxcl", "jaxcl.*"]),
)
