"""A store on a Ray cluster. Ray's actors start its processes and see to them; no tensor goes through Ray.

Everything here but `store.py` knows Ray only as what calls it.
"""
