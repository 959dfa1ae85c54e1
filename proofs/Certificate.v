(** * The certificate of the program (core/algorithms.py, certification_flow)

    The two halves together: the check of Cover.v, run on the masks whose rows of labels are right, makes an image
    row-certified. So what the program prints as certified is what the theorems speak of. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images Geometry MaskSets Cover RowCertificate DoubleMasking ChallengerMasking CoarseFirst.
Import ListNotations.

(** ** What the program computes from the two-mask labels of a clean image, row by row *)

Definition good_masks (y : label) (rows : list (list label)) : list bool := map (unanimous y) rows.

Definition certified (y : label) (rows : list (list label)) : bool := forallb (unanimous y) rows.

Section Certificate.
  Variable masks : list (list window).
  Variable shapes : list shape.
  Variable room : window.
  Variable patches : nat.
  Hypothesis shapes_are_positive : forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s.

  Definition check (chosen : list bool) : bool := cover_check masks shapes room patches chosen.

  Definition all_masks : list bool := repeat true (length masks).

  Definition certificate (y : label) (rows : list (list label)) : bool := check (good_masks y rows).

  (** ** The threat: so many patches, each inside some placement of some shape *)

  Definition patch_of_the_threat (w : window) : Prop := exists v, a_patch shapes room v /\ inside w v.

  Definition threat_of_the_program : threat pixel := fun patch =>
    exists windows, length windows = patches /\ Forall patch_of_the_threat windows /\
      forall p, patch p = region_of windows p.

  Definition regions : list (region pixel) := map region_of masks.

  Lemma region_of_a_mask : forall i, i < length masks -> mask regions i = region_of (mask_of masks i).
  Proof.
    intros i Hi. unfold mask, regions, mask_of.
    rewrite nth_indep with (d' := region_of []) by now rewrite map_length. apply map_nth.
  Qed.

  (** Patches lie inside placements of the shapes, and a mask that hides these hides the patches. *)
  Lemma a_patch_lies_in_placements : forall patch, threat_of_the_program patch ->
    exists windows, length windows = patches /\ Forall (a_patch shapes room) windows /\
      forall i, i < length masks ->
      (forall w, In w windows -> hides (region_of (mask_of masks i)) (region_of [w])) -> hides (mask regions i) patch.
  Proof.
    intros patch [windows [Hlength [Hpatches Hpatch]]].
    assert (Hlarger : exists larger, length larger = patches /\ Forall (a_patch shapes room) larger /\
      forall w, In w windows -> exists v, In v larger /\ inside w v).
    { clear Hpatch. revert Hlength. generalize patches as k.
      induction Hpatches as [|w rest [v [Hv Hinside]] Hrest IH]; intros k Hk.
      - exists []. repeat split; [assumption | constructor | intros w []].
      - destruct (IH (length rest) eq_refl) as [larger [Hl [Hall Hin]]]. exists (v :: larger).
        split; [simpl in *; lia|]. split; [now constructor|].
        intros u [<-|Hu]; [exists v; split; [now left|assumption]|].
        destruct (Hin u Hu) as [t [Ht Ht']]. exists t. split; [now right|assumption]. }
    destruct Hlarger as [larger [Hl [Hall Hin]]]. exists larger. split; [assumption|]. split; [assumption|].
    intros i Hi Hhides. rewrite region_of_a_mask by assumption.
    intros p Hp. rewrite Hpatch in Hp. apply region_of_iff in Hp. destruct Hp as [w [Hw Hp]].
    destruct (Hin w Hw) as [v [Hv Hinside]]. apply (Hhides v Hv).
    apply (a_window_hides_what_is_inside w v Hinside), region_of_iff. exists w. split; [now left | assumption].
  Qed.

  Lemma accepted_masks_hide_every_patch : forall chosen, check chosen = true ->
    forall patch, threat_of_the_program patch ->
    exists i, i < length masks /\ entry chosen i = true /\ hides (mask regions i) patch.
  Proof.
    intros chosen Hcheck patch Hpatch. destruct (a_patch_lies_in_placements patch Hpatch) as [windows [Hl [Hall Hin]]].
    assert (H := cover_check_is_exact masks shapes room patches chosen shapes_are_positive).
    destruct H as [H _]. destruct (H Hcheck windows Hl Hall) as [i [Hi [Hchosen Hhides]]].
    exists i. repeat split; auto.
  Qed.

  (** Which masks hide each placement that the check looks at. *)
  Definition listed_placements : list (list bool) :=
    map (fun rows => map (fun i => forallb (fun row => entry row i) rows) (seq 0 (length masks)))
      (combinations patches (single_rows masks shapes room)).

  Lemma a_listed_placement_stands_for_each_patch : forall patch, threat_of_the_program patch ->
    exists hiding, In hiding listed_placements /\
      forall i, i < length masks -> entry hiding i = true -> hides (mask regions i) patch.
  Proof.
    intros patch Hpatch. destruct (a_patch_lies_in_placements patch Hpatch) as [windows [Hl [Hall Hin]]].
    destruct (placements_together_have_listed_rows masks shapes room windows shapes_are_positive Hall)
      as [rows [Hrows Hhides]].
    rewrite Hl in Hrows. eexists. split; [apply in_map; exact Hrows|]. intros i Hi Hentry. apply Hin; [assumption|].
    intros w Hw. apply mask_hides_iff, Hhides; [assumption| |assumption].
    unfold entry at 1 in Hentry.
    rewrite nth_indep with (d' := forallb (fun row => entry row 0) rows) in Hentry
      by now rewrite map_length, seq_length.
    rewrite map_nth with (f := fun i => forallb (fun row => entry row i) rows), seq_nth in Hentry by assumption.
    now rewrite forallb_forall in Hentry.
  Qed.

  Theorem an_accepted_mask_set_covers : check all_masks = true -> covers regions threat_of_the_program.
  Proof.
    intros Hcheck patch Hpatch. destruct (accepted_masks_hide_every_patch _ Hcheck patch Hpatch) as [i [Hi [_ H]]].
    exists i. split; [unfold regions; now rewrite map_length | assumption].
  Qed.

  (** ** The theorem *)

  Context {value : Type}.
  Variable labels : image pixel value -> table label.
  Hypothesis visible : function_of_visible regions labels.

  Definition rows_of (x : image pixel value) : list (list label) :=
    map (row_labels regions labels x) (seq 0 (length masks)).

  Lemma a_mask_is_good_if_its_row_is : forall x y i, i < length masks ->
    entry (good_masks y (rows_of x)) i = true <-> good regions labels x y i.
  Proof.
    intros x y i Hi. unfold entry, good_masks, rows_of. rewrite map_map.
    rewrite nth_indep with (d' := unanimous y (row_labels regions labels x 0)) by now rewrite map_length, seq_length.
    rewrite map_nth with (f := fun i => unanimous y (row_labels regions labels x i)), seq_nth by assumption.
    simpl. split.
    - intros Hrow j Hj. eapply unanimous_labels_are_equal; [exact Hrow|]. now apply row_has_every_pair.
    - intros Hgood. apply equal_labels_are_unanimous. intros l Hl.
      apply row_has_only_pairs in Hl. destruct Hl as [j [Hj ->]]. now apply Hgood.
  Qed.

  (** The program certifies all images that are row-certified, and no others. *)
  Theorem the_certificate_means_row_certified : forall x y,
    certificate y (rows_of x) = true <-> row_certified regions labels threat_of_the_program x y.
  Proof.
    intros x y. assert (Hnumber : length regions = length masks) by (unfold regions; now rewrite map_length).
    split.
    - intros Hcert patch Hpatch.
      destruct (accepted_masks_hide_every_patch _ Hcert patch Hpatch) as [i [Hi [Hgood Hhides]]].
      exists i. rewrite Hnumber. split; [assumption|]. split; [assumption|]. now apply a_mask_is_good_if_its_row_is.
    - intros Hcert. apply cover_check_is_exact; [assumption|]. intros windows Hlength Hpatches.
      destruct (Hcert (region_of windows)) as [i [Hi [Hhides Hgood]]].
      { exists windows. split; [assumption|]. split; [|reflexivity]. eapply Forall_impl; [|exact Hpatches].
        intros w Hw. exists w. split; [assumption|]. unfold inside. lia. }
      rewrite Hnumber in Hi. exists i. split; [assumption|]. split; [now apply a_mask_is_good_if_its_row_is|].
      intros w Hw p Hp. rewrite <- region_of_a_mask by assumption. apply Hhides.
      apply region_of_iff in Hp. destruct Hp as [v [[<-|[]] Hp]]. apply region_of_iff. eauto.
  Qed.

  (** Two-mask correctness and a covering set give the certificate. *)
  Theorem certified_implies_the_certificate : forall x y,
    check all_masks = true -> certified y (rows_of x) = true -> certificate y (rows_of x) = true.
  Proof.
    intros x y Hcheck Hall. unfold certificate. replace (good_masks y (rows_of x)) with all_masks; [assumption|].
    unfold all_masks, certified, good_masks in *. rewrite forallb_forall in Hall.
    rewrite map_ext_in with (g := fun _ => true) by assumption. unfold rows_of. rewrite map_map.
    assert (H : forall n from, repeat true n = map (fun _ : nat => true) (seq from n)).
    { induction n as [|n IH]; intro from; simpl; [reflexivity|]. now rewrite (IH (S from)). }
    apply H.
  Qed.

  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Theorem a_certified_image_keeps_its_label : forall x y,
    certificate y (rows_of x) = true ->
    forall x', attacked threat_of_the_program x x' ->
    answer_of_double_masking regions labels majority_label order x' = y /\
    answer_of_challenger_masking regions labels order x' = y.
  Proof.
    intros x y Hcert x' Hattack. apply the_certificate_means_row_certified in Hcert.
    assert (Horder : Permutation order (seq 0 (length regions))) by (unfold regions; now rewrite map_length).
    split.
    - now apply double_masking_keeps_the_label with (R := threat_of_the_program) (x := x).
    - now apply challenger_masking_keeps_the_label with (R := threat_of_the_program) (x := x).
  Qed.
End Certificate.

(** ** A coarse round first: the coarse masks of the right label must pass the same check *)

Definition right_masks (y : label) (answers : list label) : list bool := map (Nat.eqb y) answers.

Section CoarseFirst.
  Variables masks coarse_masks : list (list window).
  Variable shapes : list shape.
  Variable room : window.
  Variable patches : nat.
  Hypothesis shapes_are_positive : forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s.

  Context {value : Type}.
  Variables labels coarse_labels : image pixel value -> table label.
  Hypothesis visible : function_of_visible (regions masks) labels.
  Hypothesis coarse_visible : function_of_visible (regions coarse_masks) coarse_labels.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Theorem a_coarse_certified_image_keeps_its_label : forall x y,
    check coarse_masks shapes room patches (right_masks y (one_mask_labels (regions coarse_masks) coarse_labels x))
      = true ->
    certificate masks shapes room patches y (rows_of masks labels x) = true ->
    forall x', attacked (threat_of_the_program shapes room patches) x x' ->
    answer_of_coarse_first (regions coarse_masks) coarse_labels
      (answer_of_double_masking (regions masks) labels majority_label order) x' = y /\
    answer_of_coarse_first (regions coarse_masks) coarse_labels
      (answer_of_challenger_masking (regions masks) labels order) x' = y.
  Proof.
    intros x y Hcoarse Hcert. apply the_certificate_means_row_certified in Hcert; [|assumption].
    apply coarse_first_and_row_certified_keeps_the_label with (R := threat_of_the_program shapes room patches);
      [assumption | assumption | unfold regions; now rewrite map_length | | assumption].
    intros patch Hpatch.
    destruct (accepted_masks_hide_every_patch coarse_masks shapes room patches shapes_are_positive _ Hcoarse patch
                Hpatch) as [i [Hi [Hright Hhides]]].
    exists i. unfold regions at 1. rewrite map_length. split; [assumption|]. split; [assumption|].
    unfold entry, right_masks, one_mask_labels in Hright. rewrite map_map in Hright.
    rewrite nth_indep with (d' := Nat.eqb y (coarse_labels x 0 0)) in Hright
      by (unfold regions; now rewrite map_length, seq_length, map_length).
    rewrite map_nth with (f := fun i => Nat.eqb y (coarse_labels x i i)), seq_nth in Hright
      by (unfold regions; now rewrite map_length).
    apply Nat.eqb_eq in Hright. symmetry. exact Hright.
  Qed.
End CoarseFirst.

(** ** The sets that the program builds pass its check *)

Theorem unions_of_covering_masks_are_accepted : forall base shapes room patches,
  (forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s) ->
  (forall w, a_patch shapes room w -> exists m, In m base /\ inside w m) ->
  let masks := combinations patches base in check masks shapes room patches (all_masks masks) = true.
Proof.
  intros base shapes room patches Hpositive Hbase masks. apply cover_check_is_exact; [assumption|].
  intros windows Hlength Hpatches. rewrite Forall_forall in Hpatches.
  destruct (unions_cover_several_patches base windows) as [mask [Hmask Hhides]]; [intros; apply Hbase; auto|].
  rewrite Hlength in Hmask. apply In_nth with (d := []) in Hmask. destruct Hmask as [i [Hi E]].
  exists i. split; [assumption|]. split.
  - unfold entry, all_masks. rewrite nth_indep with (d' := true) by now rewrite repeat_length. now rewrite nth_repeat.
  - intros w Hw p Hp. unfold mask_of, masks. rewrite E. apply Hhides.
    apply region_of_iff in Hp. destruct Hp as [v [[<-|[]] Hp]]. apply region_of_iff. eauto.
Qed.

Theorem a_built_set_is_accepted : forall room s strides patches,
  1 <= fst s -> 1 <= snd s -> 1 <= fst strides -> 1 <= snd strides ->
  let masks := combinations patches (grid room s strides) in
  check masks [s] room patches (all_masks masks) = true.
Proof.
  intros room s strides patches Hh Hw Hd Ha. apply unions_of_covering_masks_are_accepted.
  - now intros t [<-|[]].
  - intros w [t [[<-|[]] Hplaced]]. now apply grid_covers.
Qed.

(** ** Any rectangle of at most an area: it is a patch of the threat, and a family of masks passes *)

Section AnyRectangle.
  Variable area : nat.
  Variable room : window.

  Definition shapes_of_the_area : list shape := area_shapes area (height room, width room).

  Lemma shapes_of_the_area_are_positive : forall s, In s shapes_of_the_area -> 1 <= fst s /\ 1 <= snd s.
  Proof.
    intros s H. apply filter_In in H. destruct H as [H Hwide]. apply Nat.ltb_lt in Hwide.
    apply in_map_iff in H. destruct H as [h [<- Hh]]. apply in_seq in Hh. simpl in *. lia.
  Qed.

  Theorem every_rectangle_of_the_area_is_a_patch : forall s w,
    1 <= fst s -> 1 <= snd s -> fst s * snd s <= area -> placed s room w ->
    patch_of_the_threat shapes_of_the_area room w.
  Proof.
    intros s w Hh Hw Harea Hplaced.
    destruct (area_shapes_hold_every_rectangle area (height room, width room) s) as [big [Hbig Hsmaller]]; auto.
    { destruct Hplaced as [E [E' [H1 [H2 [H3 H4]]]]]. split; simpl; lia. }
    assert (Hfits := area_shapes_fit_the_room area (height room, width room) big Hbig). destruct Hfits as [H1 H2].
    destruct (a_smaller_patch_lies_inside_a_larger_one s big room w Hsmaller H1 H2 Hplaced) as [v [Hv Hinside]].
    exists v. split; [exists big; split|]; assumption.
  Qed.

  Theorem a_built_family_is_accepted : forall runs strides patches,
    concat runs = shapes_of_the_area ->
    (forall run, 1 <= fst (strides run) /\ 1 <= snd (strides run)) ->
    let masks := combinations patches (flat_map (fun run => grid room (run_shape run) (strides run)) runs) in
    check masks shapes_of_the_area room patches (all_masks masks) = true.
  Proof.
    intros runs strides patches Hruns Hstrides. apply unions_of_covering_masks_are_accepted.
    - exact shapes_of_the_area_are_positive.
    - intros w [s [Hs Hplaced]]. destruct (shapes_of_the_area_are_positive s Hs) as [Hh Hw].
      apply family_covers_every_rectangle with (area := area) (s := s); auto. now apply shapes_have_the_area in Hs.
  Qed.
End AnyRectangle.
