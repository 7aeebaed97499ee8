"""The numeric ops of kvd: one contract (`ops`), several implementations, one layout of KV blocks.

This package never imports kvd. It is installed as `kvd_kernels`.
"""
