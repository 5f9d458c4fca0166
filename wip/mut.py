import sys; sys.path.insert(0,"/work/main")
from scripts.faults import Edit, Fault, copied, failed, plant
L="outrider/serve/learning/"; T="tests/serve/test_learning.py"; J="tests/serve/test_learning_job.py"
F=[
Fault("the guard looks the other way",[Edit(L+"acceptance.py","for sign, texts in ((1, new), (-1, old)):","for sign, texts in ((-1, new), (1, old)):")],[T]),
Fault("a prompt's side is drawn each time",[Edit(L+"buffer.py","int.from_bytes(digest[:8], \"big\") % self.one_in","os.urandom(1)[0] % self.one_in")],[T]),
Fault("what shows no loss passes",[Edit(L+"trial.py","self.gain.low > 1","self.gain.low > 0")],[J]),
Fault("held-out texts train",[Edit(L+"job.py",'folder.buffer.newest("train", config','folder.buffer.newest("held_out", config')],[J]),
Fault("store: false is forgotten",[Edit("outrider/serve/service.py","call.is_stored = self.body.store is not False","call.is_stored = True")],[T]),
Fault("a version is taken with nothing to compare",[Edit(L+"learner.py","len(self._recent) < BEFORE or self._before or self.engine","self._before or self.engine")],[J]),
Fault("a version that was rolled back is taken again",[Edit(L+"learner.py","self._use(before, self.state.newest)","self._use(before, before)")],[J]),
Fault("the job runs while requests are there",[Edit(L+"learner.py","self._job.stand_still(is_busy)","self._job.stand_still(False)")],[J]),
Fault("the last step counts",[Edit(L+"acceptance.py","text.drafts[:-1]","text.drafts")],[T]),
Fault("the oldest are not deleted",[Edit(L+"buffer.py","files.pop(0).unlink()","files.pop(0)")],[T]),
Fault("a swap gives the drafter to another batch: shape unchecked",[Edit("outrider/serve/engine.py","if (shape := shape_of(drafter)) != self._shape:","if (shape := shape_of(drafter)) != self._shape and False:")],[T]),
]
only=[int(x) for x in sys.argv[1:]]
for n,f in enumerate(F):
    if only and n not in only: continue
    with copied() as there:
        plant(f,there); names,said=failed(f.tests,there,"-x")
    print(n,f.name,"caught by "+names[0] if names else "NOT CAUGHT "+said[-300:],flush=True)
