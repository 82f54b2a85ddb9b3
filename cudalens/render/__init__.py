"""Views of a report: text, HTML, widget.  Facts about the failure are computed elsewhere.

Each view is imported on first use, so that a process that shows nothing does not import ipywidgets,
jinja2 and networkx.
"""
