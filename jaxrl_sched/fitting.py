"""Looks for the mesh, the rows of a microbatch and the slots that fit."""
def fit(c, devices, room, report):
  raise NotImplementedError
