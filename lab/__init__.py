"""The lab: a GPU host and its container on one machine that has no GPU.

An outer privileged LXC container plays the Proxmox host, the roles create the GPU container inside it. Nothing in a
role knows about this package; what differs from a real fleet is data in `inventories/lab`.
"""
