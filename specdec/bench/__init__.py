"""Measuring. What decides whether speculation pays, in the order of its data:

prompts.py      what is asked; arrivals.py: when
experiment.py   the grid, the ways, the order of turns; load.py: one turn
watch.py        phases and memory beside it; scrape.py: a metrics port
record.py       what is kept of a turn; store.py: on the disk, so that a sweep goes on
figures.py      percentiles, ratios, intervals, survival; timings.py: of raw arrivals
whatif.py       the formulas; economics.py: with what was measured
verdict.py      pays, neutral, costs, and why; slices.py: of many cells; report.py: all of it as one object
tables.py, page.py, plots.py, style.py    as text, CSV and a page; advice.py: in words

The other modules measure one thing each and say so.
"""
