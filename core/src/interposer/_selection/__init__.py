"""The selection: judges and ranks the candidates for a request, and loads the winner."""
