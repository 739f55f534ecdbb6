"""Say what a step takes on hardware, attached or not, before it runs.

plan       compiles a training or decoding step for hardware, and bounds its time
hardware   names hardware, and gives the devices that a program is compiled for
memory     compiles a step of a run, and compares its memory with the device's
network    counts the bytes that a compiled program moves between devices
peaks      holds what chips can do at best, as their makers publish it
"""
