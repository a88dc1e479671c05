"""How TLT meets other people's engines and trainers, one file each."""
