"""Import this to use the backend ``smddp``: it is registered, and the variables
that scripts read are set.

Accelerate imports it, and reads ``LOCAL_RANK`` afterwards; transformers then reads
``SMDATAPARALLEL_LOCAL_RANK``.
"""

import os

from smdistributed.dataparallel.torch.backend import register
from trainworks_smdistributed.environment import complete

register()
complete(os.environ)
