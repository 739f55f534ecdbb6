"""Plans: memory and time of a step on hardware, attached or not, before it runs.

plan       compile a training or decoding step, and bound its time
hardware   named hardware, and its devices to compile for
memory     memory of a compiled step, compared with the device's
network    bytes that a compiled program moves between devices
peaks      published peak rates of chips
"""
