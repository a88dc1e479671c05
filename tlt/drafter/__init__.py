"""The small model that proposes tokens: shapes, drafting/, training/ and stored formats/."""
