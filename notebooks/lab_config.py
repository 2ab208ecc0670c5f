"""Settings of JupyterLab, as ``make notebook`` starts it: a notebook that is only read stays as it is.

JupyterLab writes the kernel's ``language_info``, with the version of Python, into every notebook that it opens. It then
shows the notebook as unsaved, and saves it after two minutes (github.com/jupyter/notebook/issues/2123). Here a notebook
comes with what the kernel would write, and is saved without.
"""

from typing import Any

from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager


class NotebooksWithoutVersions(AsyncLargeFileManager):
    """The files of the server's folder, on which Jupytext's pairs are built."""

    async def get(self, *args: Any, **options: Any) -> Any:
        """The model of a file; of a notebook with the kernel's ``language_info``."""
        model = await super().get(*args, **options)
        if model["type"] == "notebook" and model["content"] is not None:
            model["content"]["metadata"]["language_info"] = dict(IPythonKernel.language_info)
        return model

    async def save(self, model: Any, path: str = "") -> Any:
        """Writes a file; a notebook as ``execute.py`` does."""
        if model.get("type") == "notebook" and model.get("content"):
            model["content"]["metadata"]["language_info"] = {"name": "python"}
        return await super().save(model, path)


c = get_config()  # noqa: F821 - Jupyter provides it
c.ServerApp.contents_manager_class = NotebooksWithoutVersions
