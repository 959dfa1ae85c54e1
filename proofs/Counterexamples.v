(** * Weakened statements, refuted

    Each section weakens one assumption by as little as it goes, and shows an image that is lost. *)

From Coq Require Import List Bool Arith ZArith Lia.
From PatchCleanser Require Import Images Geometry MaskSets Cover RowCertificate DoubleMasking.
From PatchCleanser Require Import CoarseFirst MinorityReports SourceGrid LowerBound LocalScores.
Import ListNotations.

(** A classifier with a trigger: 0 if all visible pixels are 0; if not, the attacker chooses the label by the mask. *)
Section Trigger.
  Variable pixels : list pixel.
  Variable clean_label : list bool -> label.
  Variable attacked_label : list bool -> label.

  Definition trigger : masked_classifier pixel nat label := fun mask x =>
    (if forallb (fun p => mask p || (x p =? 0)) pixels then clean_label else attacked_label) (map mask pixels).

  Lemma trigger_fills_a_table : forall masks, function_of_visible masks (table_of masks trigger).
  Proof.
    intro masks. apply such_a_classifier_fills_a_table. intros mask mask' x x' Hmask Hsame. unfold trigger.
    rewrite (map_ext mask mask') by assumption.
    replace (forallb (fun p => mask p || (x p =? 0)) pixels)
      with (forallb (fun p => mask' p || (x' p =? 0)) pixels); [reflexivity|].
    induction pixels as [|p rest IH]; simpl; [reflexivity|]. rewrite IH. f_equal. rewrite <- Hmask.
    destruct (mask p) eqn:E; [reflexivity|]. now rewrite (Hsame p E).
  Qed.
End Trigger.

Definition clean : image pixel nat := fun _ => 0.

Definition patched (w : window) : image pixel nat := fun p => if in_window w p then 1 else 0.

Definition one_patch (s : shape) (room : window) : threat pixel := fun patch =>
  exists w, placed s room w /\ patch = region_of [w].

Definition defended (masks : list (region pixel)) (labels : image pixel nat -> table label)
    (x : image pixel nat) : label :=
  answer_of_double_masking masks labels majority_label (seq 0 (length masks)) x.

Lemma patched_is_an_attack : forall s room w, placed s room w -> attacked (one_patch s room) clean (patched w).
Proof.
  intros s room w Hw. exists (region_of [w]). split; [now exists w|]. intros p Hp. unfold patched, clean.
  simpl in Hp. rewrite orb_false_r in Hp. now rewrite Hp.
Qed.

(** ** The images *)

Definition row_of_six : window := Window 0 0 1 6.
Definition six_by_six : window := Window 0 0 6 6.
Definition corner_patch : window := Window 0 0 1 1.

Ltac within := unfold placed, inside, row_of_six, six_by_six, corner_patch; simpl; lia.

Lemma a_clean_image_has_clean_labels : forall pixels clean_label attacked_label masks i j,
  table_of masks (trigger pixels clean_label attacked_label) clean i j =
  clean_label (map (union (mask masks i) (mask masks j)) pixels).
Proof.
  intros. unfold table_of, trigger. replace (forallb _ _) with true; [reflexivity|].
  symmetry. apply forallb_forall. intros. apply orb_true_r.
Qed.

(** ** One mask, one pixel too small

    In a row of 6 px, a patch of 2 px takes masks of 3 px at 0, 2 and 3. Here the first has 2 px, and nothing hides a
    patch at 1. *)

Definition short_mask : list (region pixel) :=
  map (fun w => region_of [w]) [Window 0 0 1 2; Window 0 2 1 3; Window 0 3 1 3].

Theorem a_mask_one_pixel_too_small_loses_an_image :
  grid row_of_six (1, 2) (1, 2) = [Window 0 0 1 3; Window 0 2 1 3; Window 0 3 1 3] /\
  exists labels, function_of_visible short_mask labels /\ two_mask_correct short_mask labels clean 0 /\
  exists x', attacked (one_patch (1, 2) row_of_six) clean x' /\ defended short_mask labels x' = 1.
Proof.
  split; [reflexivity|].
  exists (table_of short_mask (trigger (pixels_of row_of_six) (fun _ => 0) (fun _ => 1))).
  split; [apply trigger_fills_a_table|]. split.
  - intros i j _ _. apply a_clean_image_has_clean_labels.
  - exists (patched (Window 0 1 1 2)). split; [|vm_compute; reflexivity].
    apply patched_is_an_attack. within.
Qed.

(** At the paper's size: masks of 63 instead of 64 px miss the patch at 32. *)
Theorem masks_of_63_px_do_not_cover_32_px : forall s, In s (axis_starts 224 32 33) -> ~ (s <= 32 /\ 32 + 32 <= s + 63).
Proof.
  intros s H. change (axis_starts 224 32 33) with [0; 33; 66; 99; 132; 160] in H. simpl in H. lia.
Qed.

(** ** Unanimity of 35 of 36

    6 x 6 px, masks and patches of 1 px: 36 masks, the patch in the corner. *)

Definition pixel_masks : list (region pixel) := map (fun w => region_of [w]) (grid six_by_six (1, 1) (1, 1)).

Definition hidden_pixels (hidden : list bool) : nat := length (filter (fun b => b) hidden).

(** In the certificate: one wrong label in a row, here under the masks of the first two pixels, is one too many. *)
Theorem rows_of_35_right_labels_do_not_certify :
  exists labels, function_of_visible pixel_masks labels /\
  (forall i, i < 36 -> 35 <= count 0 (row_labels pixel_masks labels clean i)) /\
  exists x', attacked (one_patch (1, 1) six_by_six) clean x' /\ defended pixel_masks labels x' = 1.
Proof.
  set (first_two := fun hidden : list bool =>
    if (hidden_pixels hidden =? 2) && nth 0 hidden false && nth 1 hidden false then 1 else 0).
  set (labels := table_of pixel_masks (trigger (pixels_of six_by_six) first_two (fun _ => 1))).
  exists labels. split; [apply trigger_fills_a_table|]. split.
  - assert (H : forallb (fun i => 35 <=? count 0 (row_labels pixel_masks labels clean i)) (seq 0 36) = true)
      by (vm_compute; reflexivity).
    rewrite forallb_forall in H. intros i Hi. apply Nat.leb_le, H, in_seq. lia.
  - exists (patched corner_patch). split; [|vm_compute; reflexivity].
    apply patched_is_an_attack. within.
Qed.

(** In the algorithm: a disagreer whose row agrees in 35 of 36 labels must not be returned. *)
Definition lenient_double_masking (labels : list label) (row : nat -> list label) : label :=
  let winner := majority_label labels in
  let losers := filter (fun i => negb (nth i labels 0 =? winner)) (seq 0 (length labels)) in
  match find (fun i => 35 <=? count (nth i labels 0) (row i)) losers with
  | Some i => nth i labels 0
  | None => winner
  end.

Theorem disagreers_of_35_equal_labels_lose_an_image :
  exists labels, function_of_visible pixel_masks labels /\ two_mask_correct pixel_masks labels clean 0 /\
  exists x', attacked (one_patch (1, 1) six_by_six) clean x' /\
    lenient_double_masking (one_mask_labels pixel_masks labels x') (row_labels pixel_masks labels x') = 1.
Proof.
  (* Wherever the last pixel is hidden and the patch is not, the label is wrong. *)
  exists (table_of pixel_masks
    (trigger (pixels_of six_by_six) (fun _ => 0) (fun hidden => if nth 35 hidden false then 1 else 0))).
  split; [apply trigger_fills_a_table|]. split.
  - intros i j _ _. apply a_clean_image_has_clean_labels.
  - exists (patched corner_patch). split; [|vm_compute; reflexivity].
    apply patched_is_an_attack. within.
Qed.

(** ** Masks after resizing

    A row of 3 px is enlarged to 6 px, each new pixel from its neighbours. A patch of 1 px then changes 3 px, and the
    masks, which hide every 2 px, hide 3 px nowhere. *)

Definition enlarge (x : image pixel nat) : image pixel nat :=
  fun p => x (fst p, Nat.pred (snd p) / 2) + x (fst p, snd p / 2).

Definition windows_for_two_px : list (list window) := map (fun w => [w]) (grid row_of_six (1, 2) (1, 1)).

Definition masks_for_two_px : list (region pixel) := map region_of windows_for_two_px.

Theorem masks_after_resizing_lose_an_image :
  cover_check windows_for_two_px [(1, 2)] row_of_six 1 (repeat true 5) = true /\
  exists labels, function_of_visible masks_for_two_px labels /\
  two_mask_correct masks_for_two_px labels (enlarge clean) 0 /\
  exists x', attacked (one_patch (1, 1) (Window 0 0 1 3)) clean x' /\
    defended masks_for_two_px labels (enlarge x') = 1.
Proof.
  split; [vm_compute; reflexivity|].
  exists (table_of masks_for_two_px (trigger (pixels_of row_of_six) (fun _ => 0) (fun _ => 1))).
  split; [apply trigger_fills_a_table|]. split.
  - intros i j _ _. apply (a_clean_image_has_clean_labels _ (fun _ => 0)).
  - exists (patched (Window 0 1 1 1)). split; [|vm_compute; reflexivity].
    apply patched_is_an_attack. within.
Qed.

(** ** Coarse first, with one wrong label of two

    The coarse masks hide the left and the right half of the row. The label under the left one is wrong, and the
    patch lies there, so both labels are wrong together. Two-mask correctness of the fine masks does not help. *)

Definition halves : list (region pixel) := map (fun w => region_of [w]) [Window 0 0 1 3; Window 0 3 1 3].

Definition single_pixels : list (region pixel) := map (fun w => region_of [w]) (grid row_of_six (1, 1) (1, 1)).

Theorem a_wrong_coarse_label_loses_an_image :
  exists F : masked_classifier pixel nat label,
  function_of_visible halves (table_of halves F) /\ function_of_visible single_pixels (table_of single_pixels F) /\
  two_mask_correct single_pixels (table_of single_pixels F) clean 0 /\
  table_of halves F clean 1 1 = 0 /\
  exists x', attacked (one_patch (1, 1) row_of_six) clean x' /\
    defended single_pixels (table_of single_pixels F) x' = 0 /\
    answer_of_coarse_first halves (table_of halves F) (defended single_pixels (table_of single_pixels F)) x' = 1.
Proof.
  set (left_half := fun hidden => if (hidden_pixels hidden =? 3) && nth 0 hidden false then 1 else 0).
  exists (trigger (pixels_of row_of_six) left_half (fun _ => 1)).
  split; [apply trigger_fills_a_table|]. split; [apply trigger_fills_a_table|]. split; [|split].
  - assert (H : forallb (fun i => forallb (fun j =>
      table_of single_pixels (trigger (pixels_of row_of_six) left_half (fun _ => 1)) clean i j =? 0) (seq 0 6))
      (seq 0 6) = true) by (vm_compute; reflexivity).
    rewrite forallb_forall in H. intros i j Hi Hj. change (length single_pixels) with 6 in *.
    specialize (H i ltac:(apply in_seq; lia)). rewrite forallb_forall in H. apply Nat.eqb_eq, H, in_seq. lia.
  - vm_compute. reflexivity.
  - exists (patched (Window 0 0 1 1)). split; [|split; vm_compute; reflexivity].
    apply patched_is_an_attack. within.
Qed.

(** ** One round of masks

    No defense, whatever it does, may certify an image because the paper's 36 one-mask labels agree. *)

Theorem one_round_of_masks_certifies_nothing : forall defense,
  ~ certifies_by_unanimity 0 (map (fun w => region_of [w]) (grid (Window 0 0 224 224) (32, 32) (33, 33)))
      (one_patch (32, 32) (Window 0 0 224 224)) defense.
Proof.
  intros defense Hsound. set (image := Window 0 0 224 224) in *.
  assert (Hcorner : forall t l, t + 32 <= 224 -> l + 32 <= 224 ->
    one_patch (32, 32) image (region_of [Window t l 32 32])).
  { intros t l Ht Hl. eexists. split; [|reflexivity].
    unfold placed, inside, image. cbn [top left height width fst snd]. lia. }
  assert (Hfirst := Hcorner 0 0 ltac:(lia) ltac:(lia)). assert (Hlast := Hcorner 192 192 ltac:(lia) ltac:(lia)).
  destruct (certifying_one_patch_means_covering_two (pixels_of image) Nat.eqb Nat.eqb_eq 0 1 2
    ltac:(discriminate) ltac:(discriminate) ltac:(discriminate)
    (map (fun w => region_of [w]) (grid image (32, 32) (33, 33))) (one_patch (32, 32) image)) with (defense := defense)
    (P := region_of [Window 0 0 32 32]) (Q := region_of [Window 192 192 32 32]) as [m [Hm [HP HQ]]]; auto.
  - intros patch [r c] [W [[Eh [Ew Hinside]] ->]] Hp. apply region_of_iff in Hp. destruct Hp as [w [[<-|[]] Hp]].
    apply in_window_iff in Hp. apply in_prod_iff. rewrite !in_seq. unfold inside, image in *. cbn in *. lia.
  - apply in_map_iff in Hm. destruct Hm as [w [<- Hw]].
    assert (Hlow : region_of [w] (0, 0) = true) by (apply HP; reflexivity).
    assert (Hhigh : region_of [w] (223, 223) = true) by (apply HQ; reflexivity).
    apply region_of_iff in Hlow, Hhigh. destruct Hlow as [? [[<-|[]] Hlow]], Hhigh as [? [[<-|[]] Hhigh]].
    apply in_window_iff in Hlow, Hhigh. apply in_flat_map in Hw. destruct Hw as [t [_ Hw]].
    apply in_map_iff in Hw. destruct Hw as [l [<- _]]. unfold axis_length, image in *.
    cbn [top left height width fst snd] in *. lia.
Qed.

(** ** Minority Reports with > on one side and at least on the other *)

Theorem equality_slips_between_the_two_tests : exists answers,
  first_failure (Nat.leb 5) 1 answers = None /\ alert (Nat.ltb 5) 2 answers = false.
Proof. exists [(1, 5)]. split; reflexivity. Qed.

(** ** Smoothing without the tie rule: class 0 takes the tie from class 1 *)

Theorem smoothing_needs_its_tie_rule : exists (views : list nat) (b b' : ballot) (reach : nat -> bool),
  (forall c v, reach v = false -> b' c v = b c v) /\
  (reached_views views reach <= 1)%Z /\
  (forall c, c <> 1 -> (votes views b c + 2 * 1 <= votes views b 1)%Z) /\
  ~ wins views b' 1.
Proof.
  exists [0; 1], (fun c _ => c =? 1), (fun c v => if v =? 0 then c =? 0 else c =? 1), (fun v => v =? 0).
  split; [intros c v H; now rewrite H|]. split; [vm_compute; discriminate|]. split.
  - intros c Hc. unfold votes, sum. simpl. destruct (Nat.eqb_spec c 1); [contradiction|]. lia.
  - intro H. specialize (H 0 ltac:(discriminate)). vm_compute in H. now apply H.
Qed.

(** ** PatchGuard's certificate is for one patch *)

Definition positions : list nat := seq 0 5.
Definition one_position : list (nat -> bool) := map (fun i p => p =? i) positions.

Local Open Scope Z_scope.

Theorem patchguard_certifies_one_patch_only : exists y c y' c' : nat -> Z,
  (forall w, In w one_position -> 0 < patchguard_margin positions one_position 0 1 y c w) /\
  (forall p, (2 <= p)%nat -> y' p = y p /\ c' p = c p) /\ (forall p, 0 <= y' p /\ 0 <= c' p) /\
  class_score positions one_position 0 1 y' < class_score positions one_position 0 1 c'.
Proof.
  exists (fun _ => 1), (fun _ => 0), (fun p => if (p <? 2)%nat then 0 else 1),
    (fun p => if (p <? 2)%nat then 100 else 0).
  split; [|split; [|split]].
  - intros w Hw. cbn in Hw. destruct Hw as [<-|[<-|[<-|[<-|[<-|[]]]]]]; vm_compute; reflexivity.
  - intros p Hp. destruct (Nat.ltb_spec p 2); [lia|]. split; reflexivity.
  - intro p. destruct (p <? 2)%nat; lia.
  - vm_compute. reflexivity.
Qed.
