"""The course: lessons that run the library and show what came of it, figures, puzzles, published numbers.

Each lesson is asked a question, computes the answer with the library's own arithmetic, and shows it as text, as HTML or
as data: `worked_example`, `lost_updates`, `precision`, `training`, `collective_cost`. `measured` lays what runs hold
and send beside what formulas say, `published_runs` beside what texts print. The library never imports this package.
"""
