"""Plans, which estimate the memory and time of a step on hardware that may not be attached.

plan       compilation of a training or decoding step, and bounds on its time
hardware   named hardware, and the devices to compile for
memory     memory of a compiled step, compared with the device's memory
lengths    the same for long rows on many devices, from formulas
network    bytes that a compiled program moves between devices
peaks      published peak rates of chips
"""
