"""Updates of experts, on the CPU or on the device."""
