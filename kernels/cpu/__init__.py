"""Native CPU kernels: C++ behind a plain C interface, one shared library with several ISA levels."""
