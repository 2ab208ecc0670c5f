"""The pages of the documentation's site, without the tool that builds it.

``pages`` lists every page with its Markdown, from the README, the notebooks, the figures, the package's public names,
the command line and ``docs/*.md``, and the files that lie beside them; ``python -m zerosim_site FOLDER`` writes all of
it for MkDocs, and ``check`` reads what came out. No notebook is executed, and nothing is listed by hand that a folder
or an ``__all__`` lists already.
"""
