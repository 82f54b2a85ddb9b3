"""Draws a report: text, HTML, widget.  Nothing about the failure is computed here.

Each view is loaded when it is asked for, so that ipywidgets, jinja2 and networkx stay away from a
process that shows nothing.
"""
