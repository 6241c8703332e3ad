#!/usr/bin/env bash
# What training under a method gains. DATA is MetaICL's folder; the second and third command use the trainings of the first.
trained() {
  lm-eval-icl study trained --model_args pretrained=YOURS --output trained --metadata metaicl=DATA,missing=skip,shuffle=0 \
    --train train_k=160,lora=true,learning_rate=3e-4,warmup_steps=10,steps=100,batch_size=2,eval_steps=50,eval_documents=1,save_steps=10 "$@"
}
trec="--tasks icl_trec --limit 100 --decide none,batch --seeds 100,13,21,42,87"
trained --tasks metaicl_hr_to_lr --num_fewshot 8 --orders 1 --limit 8
trained $trec --num_fewshot 8
trained $trec --num_fewshot 32
# trained.csv has the rows of the average of MetaICL's 26 tasks, and of icl_trec. `compare` has the differences with their intervals.
tasks=$(find trained/cells -name "metaicl_*,*" | sed 's#.*/##; s/,.*//' | sort -u | paste -sd,)
lm-eval-icl leaderboard trained --tasks "$tasks" --csv metaicl.csv
lm-eval-icl leaderboard trained --tasks icl_trec --csv trec.csv
lm-eval-icl compare --by training --results trained --tasks "$tasks"
lm-eval-icl compare --by training --results trained --tasks icl_trec
