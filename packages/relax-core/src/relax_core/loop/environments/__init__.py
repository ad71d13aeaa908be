"""What answers the model between its turns: tools, or an environment of the user's own.

Importing this package must stay light: `relax-train --help` reads its config section.
"""
