"""The papers' figures and tables, made again where they can be simulated, with one verdict each.

Everything is computed from public inputs in virtual time: no figure here was measured on a GPU, and
none depends on the machine. `python -m bench.figures` writes `bench/results/figures_*.json`, the
pictures in `docs/figures/`, and the tables of `docs/figures.md`.
"""
