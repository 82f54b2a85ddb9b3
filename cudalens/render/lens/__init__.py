"""The parts of the interactive view: what is linked to what, and what each pane shows.

Only :mod:`cudalens.render.widget` and the panes know ipywidgets.
"""
