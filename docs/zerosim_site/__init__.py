"""What the documentation's site is made of, without the tool that builds it.

``pages`` lists every page with its Markdown, from the README, the notebooks, the figures, the package's public names,
the command line and ``docs/*.md``; ``files`` what lies beside them; ``python -m zerosim_site``
writes both. Nothing is executed but the package's import, and nothing is listed by hand that a folder or an ``__all__`` lists already.
"""
